"""All contact with vLLM: start, discovery, requests, outputs. No other package imports it."""
