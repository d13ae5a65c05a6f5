import os
class WeightWriter:
    def __init__(self, name):
        self.fd=os.memfd_create(name); self.off=0
    def append(self, buf):
        b=memoryview(buf).cast("B"); self.off=-(-self.off//64)*64
        os.pwrite(self.fd,b,self.off) if len(b) else None; o=self.off; self.off+=len(b); return o,len(b)
    def seal(self): return self.fd
