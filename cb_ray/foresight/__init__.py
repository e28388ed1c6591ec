"""What would happen, for people at a terminal: `cb-ray plan` and `cb-ray replay` over `cb_ray/simulation` and over real servers."""
