"""Decentralised SGD on Horovod and MPI: LASGD and Stochastic Gradient Push.

The rooms; which may know which is in CONTRIBUTING.md:

    settings       the settings of a run (no torch, no MPI)
    communication  Communicator and its two forms; flat parameter buffers; process start-up
    algorithms     one page an algorithm, written against Communicator only
    workloads      data sets, shards, models
    training       the loop and what surrounds it: schedule, evaluation, checkpoints, records
    simulation     the virtual cluster, and the independent global-view oracle
"""
