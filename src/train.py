"""Trains a model with decentralised SGD.

horovodrun -np 4 python src/train.py              four workers on this machine, LASGD on digits
mpirun -np 4 python src/train.py --tau-max 5      the same by MPI's own launcher
python src/train.py --help                        one worker needs no launcher; all options
"""

from pushreduce.communication import startup

if __name__ == "__main__":
    startup.install_exception_hook()  # a rank that fails in the imports below must not leave the others waiting for it
    from pushreduce.main import main

    main()
