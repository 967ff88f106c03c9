"""The RPC handlers: validate, admit, call down, stream back."""
