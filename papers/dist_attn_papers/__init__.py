"""The papers' tables, studies and comparisons of dist-attn: `dist-attn bench` lists and starts them."""
