"""`twellc.optimize`: blocks of an eager module, found by tracing its parts, run by the `twell` ops where they stand."""
