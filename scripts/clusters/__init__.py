"""Hosts for trying a program out, made of this machine's network namespaces: the parts of scripts/emulated_cluster.

Python's standard library only, so that they run under any interpreter that root has.
"""
