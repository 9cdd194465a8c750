"""One call of attention, checked and frozen: every error that a user can cause is raised here."""
