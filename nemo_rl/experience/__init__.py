"""From prompts to rows in the data plane: sampling, environments, and what happens when either fails."""
