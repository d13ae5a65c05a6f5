"""Providers compute: the contract, the messages, the worker process, and one folder per provider."""
