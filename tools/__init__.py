"""Tools show: the `outrider` command line, benchmarks, checks."""
