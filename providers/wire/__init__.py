"""What crosses between coordinator and workers: dtypes, the plain graph, values, messages."""
