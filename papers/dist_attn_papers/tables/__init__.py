"""The papers' tables and figures at small scale: `dist-attn bench NAME` trains, measures and files."""
