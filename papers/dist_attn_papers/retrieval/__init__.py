"""How well vectors and words find texts: data fetched by name, rankings, and one table."""
