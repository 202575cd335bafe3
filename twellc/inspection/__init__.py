"""`twellc inspect`: what is known of a model or a plan."""
