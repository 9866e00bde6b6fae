"""The rank process: takes numbered steps from the controller and runs the model on its device."""
