"""What is generated in the documentation: support tables, figures, the API reference, pictures.

    python -m docs.generate

writes all of it, and `make docs` runs this. Everything is computed from the package itself, and gives the same text on
every machine; tests compare what is here with what would be generated.
"""

# Pages with tables that `tokenyard.lab.support` writes.
SUPPORT_PAGES = ("docs/support.md", "docs/guide/errors.md")
