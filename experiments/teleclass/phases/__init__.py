"""The phases of TELEClass, one module each; none of them imports another."""
