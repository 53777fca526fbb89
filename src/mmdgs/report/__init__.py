"""Pages that commands and experiments write: tables, figures and claims, as HTML and JSON."""
