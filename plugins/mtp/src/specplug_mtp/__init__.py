"""MTP for specplug: heads that live in the target's own checkpoint, and assistants that read its KV."""
