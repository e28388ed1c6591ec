"""The roof: Ray Serve deployments around the engine, the router and the text floor. Nobody below imports it."""
