"""How long tests wait. Nothing that passes depends on it, so that it is long enough for the busiest machine."""

# For something that must come: whoever waits longer has found a fault.
PATIENCE_S = 90.0
# For a whole test: beyond it, it hangs.
HANGS_S = 300
