"""Pages for people, on `/` of the application: what is served, what it is worth, what is being tried."""
