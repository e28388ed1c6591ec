"""The engine floor: threads, mailboxes and transformers' methods round the pure core and the runner."""
