"""The simulated mailbox as its user meets it: times, beginning, end, and the misuse that it notices."""

import numpy as np
import pytest

from pushreduce.communication.simulated import SimulatedCluster
