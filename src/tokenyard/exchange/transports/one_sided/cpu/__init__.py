"""`one_sided` on CPUs: ranks copy rows through memory that all processes of a host map."""
