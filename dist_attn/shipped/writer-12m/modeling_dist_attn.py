"""What transformers loads with trust_remote_code=True, where dist-attn is installed."""
