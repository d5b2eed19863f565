"""Makes docs/generated/ and the table in README from results/*.json and the sources of the steps."""
