"""What people look with: memory, profiles, the check of a machine."""
