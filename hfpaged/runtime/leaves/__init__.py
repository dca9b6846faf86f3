"""Native leaves: stock's model and layer code, whose linear modules, norms, MLPs and attention layers run natively."""
