"""The layers around attention: the front end that writes K and V, linear, RMSNorm with its residual, the activation.

The native CPU kernels compute each row alone, always in the same order: a row's result is the same, bit for bit,
whatever rows stand beside it and however many threads run. torch's own products promise that on no device.
"""
