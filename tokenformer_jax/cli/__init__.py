"""Define the commands: `main` runs one, `verbs` lists them, and each has a file of its name."""
