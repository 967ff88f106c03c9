"""A router over several workers that sends each prompt where most of it is cached.

`overlap` keeps what the workers have cached, in Dynamo's radix tree; `following` keeps that true
over a worker's restarts and broken connections; `routing` chooses and sends. `python -m
examples.kv_router` compares it with round-robin.
"""
