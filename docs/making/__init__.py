"""What makes the documentation site out of the pages: hooks of mkdocs, generated pages, figures."""
