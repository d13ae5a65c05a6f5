"""Memory and signals that cross processes. Knows nothing of ONNX."""
