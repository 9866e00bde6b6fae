"""Documents in, rows of vectors out, and estimates of what that takes."""
