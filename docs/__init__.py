"""The documentation: pages in Markdown, and the programs that generate parts of them (`docs.generate`)."""
