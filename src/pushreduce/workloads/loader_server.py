"""Imported once, by the server process that loader processes are forked from, and by nothing else.

The loaders of a rank share the memory of torch through it, and are spared the seconds of importing it. It
leaves the process group, because Ctrl-C and launchers signal whole groups while the rank still needs its
loaders for the steps up to its last checkpoint; it ends when the rank does.
"""

import os

import torch  # noqa: F401
import torchvision.transforms  # noqa: F401

os.setsid()
