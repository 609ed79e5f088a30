"""Training that goes on in the same processes when nodes are lost or join; needs gloo."""
