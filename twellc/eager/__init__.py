"""`twellc.optimize`: blocks of an eager module, found by tracing its parts, and run by the `twell` ops in place."""
