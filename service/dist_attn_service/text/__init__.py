"""Text on its way to tokens and back: spools, tokenisers, stop strings, chat templates."""
