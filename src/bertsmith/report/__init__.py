"""Pages and pictures for people: self-contained, without any outside resource."""
