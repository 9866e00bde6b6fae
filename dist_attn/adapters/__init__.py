"""Models of transformers over our operations along the sequence."""
