"""The contract: columns, recipe, manifest, reasons and errors, each declared once."""
