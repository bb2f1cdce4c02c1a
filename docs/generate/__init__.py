"""What is generated in the documentation: support tables, figures, tables of errors, the API reference, pictures.

    python -m docs.generate

writes all of it, and `make docs` runs this. Everything is computed from the package itself, and gives the same text on
every machine; tests compare what is here with what would be generated.
"""
