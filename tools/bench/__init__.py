"""`outrider bench`: what Outrider costs on this machine. Nothing here is a test or takes part in a session."""
