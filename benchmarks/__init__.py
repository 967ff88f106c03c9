"""Measurements of what this server costs, beside vLLM's own ways to serve. Not installed."""
