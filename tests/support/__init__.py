"""What several test files share and no test promises by itself."""
