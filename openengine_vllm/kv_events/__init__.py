"""The KV event bridge: from vLLM's publishers to the contract's batches. Knows no vllm, no grpc."""
