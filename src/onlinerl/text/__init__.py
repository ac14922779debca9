"""Between text and tokens: tokenizers, and the templates of fill-in-the-middle prompts. Without torch."""
