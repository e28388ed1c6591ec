"""Text on one side, token ids on the other: codec, chat templates, incremental detokenization. Knows no engine and no HTTP."""
