"""Devices, kernels, quantisation: only here are torch.cuda, torch.npu, torch_npu and MindSpeed called."""
