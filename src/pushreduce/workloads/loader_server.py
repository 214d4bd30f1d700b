"""Imported once by the server process that loader processes are forked from; not imported by anything else.

It shares the memory of torch and Pillow between a rank's loader processes and saves each the seconds of
importing them. It must outlive signals sent to the whole job, for its end would end the loaders while the
rank finishes its step; it goes when the rank does.
"""

import signal

import torch  # noqa: F401
import torchvision.transforms  # noqa: F401

signal.signal(signal.SIGTERM, signal.SIG_IGN)
