"""`outrider conformance SPEC`: contract and operator cases against any provider, in its own process."""
