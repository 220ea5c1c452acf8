"""No models: Fairlane keeps its own schema. Django tells only apps that have this module of a finished `migrate`."""
